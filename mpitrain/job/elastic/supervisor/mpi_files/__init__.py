"""What MPI keeps on the hosts of a launch, outside of the run's folder: the folder of mpirun and its daemons, and shared memory."""
