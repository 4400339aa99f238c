"""`python -m mpitrain report`: one HTML file about one or more runs."""
