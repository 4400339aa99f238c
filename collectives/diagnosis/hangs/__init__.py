"""Waits that last: the thread of each rank that answers for it, asks the others, and tells of them. The deadline ends a hang."""
