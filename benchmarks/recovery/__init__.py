"""The time from the kill of a rank to the next step, beside torchrun's restart: `python -m mpitrain bench recovery`, without mpirun.

All contestants train a GPT of the same size on 2 ranks, save every 10 steps, and lose a rank right after a step 10 k + 9. So each of
them does 9 steps again; but a replica of torchft goes on. contestants.py: how each is started. fsdp2.py, torchft_ddp.py: the peers'
programs. trial.py: one kill. recovery_command.py: the command.
"""
