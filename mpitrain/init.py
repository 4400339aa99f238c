"""Initial values of parameters, which are the same for every number of ranks: `initialize`, and what a rule of a model returns."""

from mpitrain.placement.fills import BLOCK as BLOCK
from mpitrain.placement.fills import Constant as Constant
from mpitrain.placement.fills import Init as Init
from mpitrain.placement.fills import Normal as Normal
from mpitrain.placement.fills import fill_ as fill_
from mpitrain.weights.initial_values import initialize as initialize
