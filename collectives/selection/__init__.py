"""The choice of the algorithm for "auto": the rules, the table of measurements, and the files of measured tables."""
