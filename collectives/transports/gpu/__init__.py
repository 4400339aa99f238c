"""Transports between devices: NCCL, and CUDA-aware MPI."""
