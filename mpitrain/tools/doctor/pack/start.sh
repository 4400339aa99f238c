#!/usr/bin/env bash
# An environment of Python in one file, made by `python -m mpitrain pack`. On each node it is unpacked once, into the node's memory:
#
#   FILE COMMAND ...     runs COMMAND in the environment, as each rank does. The first one of the node unpacks it, and it is removed
#                        after the last one has ended
#   FILE unpack          unpacks it, to stay until `remove` (one process a node)
#   FILE remove          removes it, unless a process still runs in it
#   FILE show            says what is in it
#
#   MPITRAIN_PACK_DIR    the folder for it (default: MPITRAIN_SHM_DIR, else /dev/shm); a local disk needs less memory
#
# If FILE cannot be executed where it lies: bash FILE ...
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"
set -euo pipefail
# What this script itself runs is the system's: looked up in the folders of the former environment, each program costs dozens of calls.
path_before=$PATH libraries_before=${LD_LIBRARY_PATH-}
PATH=/usr/bin:/bin:$PATH
unset LD_LIBRARY_PATH
# MPITRAIN_PACK_VALUES

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2 || true; }

die() {
    say "error: $*"
    exit 1
}

here() { printf '%s on %s' "$parent" "$(uname -n)"; }

check_tools() {
    local tool
    for tool in awk cut dd df env flock head mkdir mktemp mv readlink rm sed setsid sha256sum stat tail tar tee uname xargs; do
        command -v "$tool" >/dev/null || die "$tool is missing on $(uname -n 2>/dev/null): a pack needs it"
    done
}

gb() { awk -v bytes="$1" 'BEGIN { printf "%.2f GB", bytes / 1e9 }'; }

# What runs here may only this user have made: neither in the folder itself, nor by another folder of its name. Who can write to one
# above can rename it, unless that one is sticky, as /dev/shm is. In a container without root one number stands for root outside and for
# all other users, so there only the system's own folders may have it.
check_above() {
    local above=$base folders=(/) owner mode folder_above outside
    while [ "$above" != / ]; do
        folders+=("$above")
        above=${above%/*}
        above=${above:-/}
    done
    outside=$(stat -c %u /)
    while read -r owner mode folder_above; do
        case $owner:$folder_above in
        "$EUID":* | 0:* | "$outside":/ | "$outside":/dev | "$outside":/dev/shm | "$outside":/run | "$outside":/tmp | "$outside":/var | "$outside":/var/tmp)
            [ $((8#$mode & 8#22)) != 0 ] && [ $((8#$mode & 8#1000)) = 0 ] || continue
            ;;
        esac
        die "others could replace the environment in $base: $folder_above belongs to user $owner, mode $mode;" \
            "set MPITRAIN_PACK_DIR to a folder of yours that nobody else can write to"
    done < <(stat -c '%u %a %n' -- "${folders[@]}")
}

is_own() { # mkdir gives the setgid bit of the folder above on
    [ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ] && [[ $(stat -c %a -- "$1") =~ ^[0-7]?700$ ]]
}

# Sets parent and folder. Another user can make a name first, which this one cannot remove, so there are eight, as for copies of the state.
choose_folder() { # $1: make: it may be made
    local name said why=''
    base=$(readlink -e -- "$above_parent") && [ -d "$base" ] || die "$above_parent on $(uname -n) is no folder: set MPITRAIN_PACK_DIR to one"
    check_above
    names=("${base%/}/mpitrain-pack-$EUID"{,.1,.2,.3,.4,.5,.6,.7})
    for name in "${names[@]}"; do
        parent=$name folder=$name/$id
        [ ! -d "$folder" ] || ! is_own "$name" || return 0
    done
    for name in "${names[@]}"; do
        parent=$name folder=$name/$id
        [ -z "${1-}" ] || said=$(mkdir -m 700 -- "$name" 2>&1) || why=${why:-${said##*: }}
        ! is_own "$name" || return 0
    done
    parent=${names[0]} folder=${names[0]}/$id
    [ -n "${1-}" ] || return 0
    [ -e "$parent" ] || [ -L "$parent" ] || die "$(here) cannot be made ($why): set MPITRAIN_PACK_DIR to a folder of a local disk"
    die "$(here), and 7 more names, must belong to you, with mode 700: set MPITRAIN_PACK_DIR to another folder"
}

# One process of this user at a time unpacks or removes (descriptor 9). A process in the environment shares a lock on its folder
# (descriptor 8), which the kernel drops however the process ends.
lock() {
    exec 9<"$parent"
    flock 9 7<&-
}

unlock() { exec 9<&-; }

warn_if_old() { # by the process that speaks for the job: looking costs a call a file
    case ${OMPI_COMM_WORLD_RANK-${PMIX_RANK-${PMI_RANK-${SLURM_PROCID-0}}}} in 0) ;; *) return 0 ;; esac
    local newer
    mapfile -t newer < <(xargs -0 -r stat -L -c '%.6Y %n' <"$folder/.sources" 2>/dev/null |
        awk -v at="$packed_at" '$1 > at + 0 { sub(/[^ ]* /, ""); print }')
    local others=''
    [ ${#newer[@]} -le 1 ] || others=" (and $((${#newer[@]} - 1)) more)"
    [ ${#newer[@]} = 0 ] || say "note: ${newer[0]}$others has changed since this was packed: to use that, pack again"
}

check_room() {
    local size free
    [ "$(uname -m)" = "$machine" ] || die "packed on $machine, and $(uname -n) is $(uname -m): pack on a host of this kind"
    size=$(stat -L -c %s -- "$pack")
    [ "$size" = $((header + payload)) ] || die "$pack is damaged: expected $((header + payload)) bytes, found $size; copy it again, or pack again"
    free=$(df --output=avail -B1 -- "$parent" | tail -n 1)
    [ "$free" -gt "$unpacked" ] || die "$(here) has room for $(gb "$free") and $(gb "$unpacked") are needed: ask for more memory," \
        "pack with --without, or set MPITRAIN_PACK_DIR to a folder of a local disk"
    case ,$(findmnt -no OPTIONS -T "$parent" 2>/dev/null), in
    *,noexec,*) die "programs may not run in $(here) (it is mounted noexec): set MPITRAIN_PACK_DIR to a folder of a local disk" ;;
    esac
}

# What was interrupted: nobody else unpacks or removes now.
sweep() { rm -rf -- "$parent"/.new.* "$parent"/*.dead; }

# To a folder with another name, which is renamed when all is there and the checksum fits. So the name stands for a whole environment.
unpack() { # $1: with_remover
    sweep
    check_room
    local new sum
    new=$(mktemp -d "$parent/.new.XXXXXX")
    trap 'rm -rf -- "$new"' EXIT
    trap 'exit 143' TERM INT HUP
    [ -z "${1-}" ] || start_remover "$new" # now, as this process may be killed
    # tee -p: on to the end although tar has ended, by an error or after its last file, so that the checksum is that of all.
    # tar's standard output is the pipe to sha256sum, which so waits for the end of tar, too.
    sum=$(dd if="$pack" bs=16M iflag=skip_bytes,fullblock skip="$header" status=none 2>"$new/.read" |
        tee -p >(tar -xf - -C "$new" --no-same-owner 2>"$new/.said" && : >"$new/.whole") 2>/dev/null |
        sha256sum | cut -d ' ' -f 1) || true
    [ ! -s "$new/.read" ] || die "$pack: $(head -n 1 "$new/.read")"
    [ "$sum" = "$checksum" ] || die "$pack is damaged: its SHA-256 is $sum, expected $checksum; copy it again, or pack again"
    [ -e "$new/.whole" ] || die "$pack cannot be unpacked to $(here): $(head -n 1 "$new/.said" 2>/dev/null)"
    rm -f "$new/.said" "$new/.read" "$new/.whole"
    # Python finds its library by this file
    [ ! -f "$new/env/pyvenv.cfg" ] || [ ! -d "$new/python" ] || sed -i "s|^home = .*|home = $folder/python/bin|" "$new/env/pyvenv.cfg"
    chmod 700 "$new"
    mv -T -- "$new" "$folder"
    trap - EXIT TERM INT HUP
}

# With the lock: removes the folder unless a process runs there. 1: one does. 2: it cannot be removed.
remove_if_free() {
    [ -d "$folder" ] || return 0
    (
        exec 8<"$folder"
        flock -n 8 || exit 1
        sweep && mv -T -- "$folder" "$folder.dead" && rm -rf -- "$folder.dead" || exit 2 # at once, as a rank of another job may look for it
    )
}

# With the lock: a process beside the ranks, which removes the folder after the last one. There is one of a folder: it holds the lock of
# a file in it (descriptor 7), so that another takes its place if it was killed.
start_remover() { # $1: the folder, perhaps under its first name
    exec 7>>"$1/.remover"
    if flock -n 7; then
        # without variables: those of a supervised launch would have it ended with what the ranks leave
        env -i PATH="$PATH" setsid bash "$pack" .remove-at-end "$parent" </dev/null >/dev/null 2>&1 8<&- 9<&- &
    fi
    exec 7>&-
}

remove_at_end() {
    local rc
    while lock && [ ! -e "$folder/.stay" ]; do # it waits for the process that unpacks
        rc=0
        remove_if_free || rc=$?
        if [ $rc != 1 ]; then
            sweep
            break
        fi
        unlock
        exec 8<"$folder" || continue
        flock 8 7<&- # a program that waits longer than this process must not keep its lock
        exec 8<&-
    done
}

# All of this pack in the folders of this user. 1: a process still runs in it.
remove() {
    local name rc
    for name in "${names[@]}"; do
        is_own "$name" || continue
        parent=$name folder=$name/$id rc=0
        lock
        remove_if_free || rc=$?
        [ $rc != 1 ] || die "processes still run in $folder: end them first"
        sweep || rc=2
        [ $rc = 0 ] || die "$(here) cannot be emptied, see above"
        unlock
    done
}

# The folders of a path that are not in the environment as it lay when it was packed. mpirun gives its ranks some of those.
elsewhere() {
    local part kept='' parts
    IFS=: read -ra parts <<<"$1"
    for part in ${parts[@]+"${parts[@]}"}; do
        [ "$part" -ef "$was/${part##*/}" ] || kept+=${kept:+:}$part
    done
    printf '%s' "$kept"
}

run() {
    choose_folder make
    lock
    if [ ! -d "$folder" ]; then
        unpack with_remover
    elif [ ! -e "$folder/.stay" ]; then
        start_remover "$folder"
    fi
    exec 8<"$folder"
    flock -s 8
    unlock
    [ -e "$folder/.stay" ] || warn_if_old
    local env=$folder/$prefix
    PATH=$env/bin:$(elsewhere "$path_before")
    local search=()
    [ -z "$libraries" ] || search+=("$folder/$libraries")
    [ "$own_mpi" = 0 ] || search+=("$env/lib")
    local before
    before=$(elsewhere "$libraries_before")
    [ -z "$before" ] || search+=("$before")
    local IFS=:
    [ ${#search[@]} = 0 ] || export LD_LIBRARY_PATH="${search[*]}"
    export PATH PYTHONNOUSERSITE=1
    unset PYTHONHOME PYTHONPATH
    [ "$prefix" = python ] || export VIRTUAL_ENV=$env
    [ ${#paths[@]} = 0 ] || export PYTHONPATH="${paths[*]/#/$folder/}"
    # The wheel's mpirun has said to its ranks where its own files are.
    [ "$own_mpi" = 0 ] || export OPAL_PREFIX=$env PMIX_PREFIX=$env PRTE_PREFIX=$env
    # Without -P each import looks first into the current folder.
    case ${1##*/}:${2-} in python:-m | python3:-m) set -- "$1" -P "${@:2}" ;; esac
    # A command of the environment by its former path, as a launcher may give it
    case $1 in */*) [ "${1%/*}" != "$was/bin" ] && [ ! "${1%/*}" -ef "$was/bin" ] || set -- "$env/bin/${1##*/}" "${@:2}" ;; esac
    if [ -z "$(type -P -- "$1")" ]; then
        say "error: $1 is no program of this environment or of $(uname -n); expected a command, unpack, remove or show"
        exit 127
    fi
    exec "$@"
}

main() {
    check_tools
    pack=$(readlink -f -- "$0")
    above_parent=${MPITRAIN_PACK_DIR:-${MPITRAIN_SHM_DIR:-/dev/shm}}
    id=${checksum:0:16}
    case ${1-} in show | unpack | remove) [ $# = 1 ] || die "$1 takes no further words, got: ${*:2}" ;; esac
    case ${1-} in
    '' | -h | --help | help) sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$pack" | head -n 12 ;;
    show)
        choose_folder
        printf '%s\n' "$about" "unpacked: $(gb "$unpacked"), to $folder ($([ -d "$folder" ] && echo there now || echo not there))"
        ;;
    unpack)
        choose_folder make
        lock
        [ -d "$folder" ] || unpack
        warn_if_old
        : >"$folder/.stay"
        ;;
    remove)
        choose_folder
        remove
        ;;
    .remove-at-end)
        parent=$2 folder=$2/$id
        remove_at_end
        ;;
    *) run "$@" ;;
    esac
}

main "$@"
exit # what follows is no text
