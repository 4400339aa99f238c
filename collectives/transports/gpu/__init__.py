"""From device to device: NCCL, and CUDA-aware MPI."""
