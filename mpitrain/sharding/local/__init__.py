"""Local steps: the copies of a model train apart, and meet in an outer step every few steps. Begin with diloco.py."""
