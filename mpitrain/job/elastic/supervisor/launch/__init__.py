"""One launch of a job: its process, the limits of its phases, and the kills for memory that may have ended it."""
