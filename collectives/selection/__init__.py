"""Which algorithm `auto` takes: the rules, the table of measurements, and where a measured one is kept."""
