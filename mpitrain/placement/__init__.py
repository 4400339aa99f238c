"""What a rank holds of a whole parameter, and where its values come from."""
