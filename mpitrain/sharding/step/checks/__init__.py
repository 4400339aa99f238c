"""What a program must not do with a sharded model, and mostly does by mistake: an error or a warning that says what to do."""
