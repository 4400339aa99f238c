"""What the files of a run say, line by line, with types and without what a terminal would obey. They may be a stranger's."""
