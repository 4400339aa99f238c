"""Views of arrays of any library, element types, and the arithmetic of reductions in host memory."""
