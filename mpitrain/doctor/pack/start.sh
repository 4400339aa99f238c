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

gb() { awk -v bytes="$1" 'BEGIN { printf "%.2f GB", bytes / 1e9 }'; }

# Only this user may have made what runs here: a folder that others can write would give them the ranks.
own_folder() {
    mkdir -m 700 -- "$parent" 2>/dev/null || true
    [ -d "$parent" ] && [ ! -L "$parent" ] || die "$(here) cannot be made: set MPITRAIN_PACK_DIR to a folder of a local disk"
    [ -O "$parent" ] && [ "$(stat -c %a -- "$parent")" = 700 ] ||
        die "$(here) must belong to you, with mode 700: remove it, or set MPITRAIN_PACK_DIR to another folder"
}

# One process of this user at a time unpacks or removes (descriptor 9). A process in the environment shares a lock on its folder
# (descriptor 8), which the kernel drops however the process ends.
lock() {
    own_folder
    exec 9<"$parent"
    flock 9
}

unlock() { exec 9<&-; }

warn_if_old() { # by the process that speaks for the job: looking costs a call a file
    case ${OMPI_COMM_WORLD_RANK-${PMIX_RANK-${PMI_RANK-${SLURM_PROCID-0}}}} in 0) ;; *) return 0 ;; esac
    local newer
    mapfile -t newer < <(xargs -0 -r stat -L -c '%.6Y %n' <"$folder/.sources" 2>/dev/null |
        awk -v at="$packed_at" '$1 > at + 0 { sub(/[^ ]* /, ""); print }')
    [ ${#newer[@]} = 0 ] || say "note: ${newer[0]} has changed since this was packed (${#newer[@]} files in all): to use that, pack again"
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

# To a folder with another name, which is renamed when all is there and the checksum fits. So the name stands for a whole environment.
unpack() {
    rm -rf -- "$parent"/.new.* # of one that was interrupted: nobody else unpacks now
    check_room
    local new sum tar
    new=$(mktemp -d "$parent/.new.XXXXXX")
    trap 'rm -rf -- "$new"' EXIT
    trap 'exit 143' TERM INT HUP
    mkfifo "$new/.pipe"
    tar -xf "$new/.pipe" -C "$new" --no-same-owner 2>"$new/.said" 9<&- &
    tar=$!
    # -p: on to the end although tar has ended, by an error or after its last file, so that the checksum is that of all
    sum=$(dd if="$pack" bs=16M iflag=skip_bytes,fullblock skip="$header" status=none 2>"$new/.read" | tee -p "$new/.pipe" 2>/dev/null |
        sha256sum | cut -d ' ' -f 1) || true
    local rc=0
    wait "$tar" || rc=$?
    [ ! -s "$new/.read" ] || die "$pack: $(head -n 1 "$new/.read")"
    [ "$sum" = "$checksum" ] || die "$pack is damaged: its SHA-256 is $sum, expected $checksum; copy it again, or pack again"
    [ "$rc" = 0 ] || die "$pack cannot be unpacked to $(here): $(head -n 1 "$new/.said")"
    rm -f "$new/.pipe" "$new/.said" "$new/.read"
    # Python finds its library by this file
    [ ! -f "$new/env/pyvenv.cfg" ] || [ ! -d "$new/python" ] || sed -i "s|^home = .*|home = $folder/python/bin|" "$new/env/pyvenv.cfg"
    chmod 700 "$new"
    mv -T -- "$new" "$folder"
    trap - EXIT TERM INT HUP
}

# Whether nothing runs there; if so, the folder is gone.
remove_if_free() {
    [ -d "$folder" ] || return 0
    (
        exec 8<"$folder"
        flock -n 8 || exit 1
        mv -T -- "$folder" "$folder.dead" # at once, as a rank of another job may look for it
        rm -rf -- "$folder.dead"
    )
}

# Beside the ranks, until the last one has ended.
remove_at_end() {
    [ -d "$folder" ] || return 0
    exec 8<"$folder"
    flock 8
    exec 8<&-
    lock
    [ -e "$folder/.stay" ] || remove_if_free || true
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
    lock
    if [ ! -d "$folder" ]; then
        unpack
        exec 8<"$folder"
        flock -s 8
        setsid bash "$pack" .remove-at-end </dev/null >/dev/null 2>&1 8<&- 9<&- &
    else
        exec 8<"$folder"
        flock -s 8
    fi
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
    exec "$@"
}

main() {
    pack=$(readlink -f -- "$0")
    parent=${MPITRAIN_PACK_DIR:-${MPITRAIN_SHM_DIR:-/dev/shm}}/mpitrain-pack-$(id -u)
    folder=$parent/${checksum:0:16}
    case ${1-} in
    '' | -h | --help | help) sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$pack" | head -n 12 ;;
    show) printf '%s\n' "$about" "unpacked: $(gb "$unpacked"), to $folder ($([ -d "$folder" ] && echo there now || echo not there))" ;;
    unpack)
        lock
        [ -d "$folder" ] || unpack
        warn_if_old
        : >"$folder/.stay"
        ;;
    remove)
        lock
        remove_if_free || die "processes still run in $folder: end them first"
        ;;
    .remove-at-end) remove_at_end ;;
    *) run "$@" ;;
    esac
}

main "$@"
exit # what follows is no text
