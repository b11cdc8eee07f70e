"""What ran when: NVTX ranges in the program, and Nsight Systems around it."""
