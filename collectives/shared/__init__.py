"""What commands and benchmarks share: arguments, units, tables, pictures, output on one rank. It imports neither MPI nor torch."""
