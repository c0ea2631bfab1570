#!/bin/sh
# Makes .venv and installs pagefork into it, editable, with the extras named by $1 and the right build of MLX.
# As root on a Debian-like system it also installs what is missing there: python3-venv, BLIS (or OpenBLAS), and g++ for the tests.
# PAGEFORK_APT=0 forbids that. PYTHON picks the interpreter.
set -eu
cd "$(dirname "$0")/.."
extras="$1"
system="$(uname -s)"

say() { echo "setup: $*" >&2; }

apt_updated=
apt_install() {
    [ "${PAGEFORK_APT:-1}" != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    if [ -z "$apt_updated" ]; then
        apt-get update -qq >/dev/null 2>&1 || true
        apt_updated=1
    fi
    say "installing $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.14 python3.11 python; do
        if recent "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

make_venv() {
    if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    python="$(find_python)" || { apt_install python3 python3-venv && python="$(find_python)"; } || {
        say "Python 3.11 or newer is needed; install it, or name it: make PYTHON=/path/to/python3 ..."
        return 1
    }
    rm -rf .venv
    if "$python" -m venv .venv >/dev/null 2>&1; then return 0; fi
    rm -rf .venv
    if apt_install python3-venv && "$python" -m venv .venv; then return 0; fi
    rm -rf .venv
    if command -v uv >/dev/null 2>&1 && uv venv --quiet --seed --python "$python" .venv; then return 0; fi
    rm -rf .venv
    say "$python cannot make a virtual environment; install its venv module (Debian, Ubuntu: apt install python3-venv)"
    return 1
}

has_library() {
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q "$1"
}

make_venv

if [ "$system" = Linux ]; then
    if nvidia-smi -L >/dev/null 2>&1; then
        extras="cuda13,$extras"
    else
        extras="cpu,$extras"
        has_library 'libblis\.so\.4' || apt_install libblis4-openmp ||
            has_library 'libopenblas\.so\.0' || apt_install libopenblas0-pthread ||
            say "no fast BLAS found: MLX will be slow on this CPU (Debian, Ubuntu: apt install libblis4-openmp)"
    fi
    case ",$extras," in
    *,dev,*)
        command -v g++ >/dev/null 2>&1 || apt_install g++ || say "g++ not found: the tests that need it fail"
        ;;
    esac
fi

say "installing pagefork[$extras] into .venv"
.venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --editable ".[$extras]"
