"""What the machine is: its limits and measured constants, and how much memory a process of this host may take."""
