"""Arrays: one view of any library's, element types, and the arithmetic of reductions in host memory."""
