"""What a rank sees of the other ranks of its node that give no answer: their notes, their processes and their stacks."""
