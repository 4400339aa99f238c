"""The thread of each rank that answers for it, asks the others, and tells of waits that last."""
