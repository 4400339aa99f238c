"""Long waits and hangs: a thread of each rank answers for the rank, asks the other ranks and reports. The deadline ends a hang."""
