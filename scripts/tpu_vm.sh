#!/usr/bin/env bash
# Installs jaxserve on a TPU VM and serves a model there. Run it on the VM, from a checkout.
set -euo pipefail

usage() {
  cat <<'END'
usage: scripts/tpu_vm.sh [options] [MODEL] [-- FLAGS OF jaxserve serve]

Installs jaxserve with JAX for TPUs into a virtual environment, checks that JAX sees the chips, and serves. A second
run finds everything installed. MODEL is a directory, a Hugging Face model id, or "demo" (the default).

  --venv DIR       the virtual environment (default: ~/jaxserve-venv)
  --extra NAME     extra to install: tpu (default), or none for a trial on a CPU
  --install-only   install and check, and do not serve
  --dry-run        print the commands instead of running them
  --help           print this

The server listens on 127.0.0.1 unless JAXSERVE_API_KEY is set; then on all addresses. From elsewhere, without opening
a port:

  gcloud compute tpus tpu-vm ssh NAME --zone ZONE -- -L 8000:127.0.0.1:8000

Example: scripts/tpu_vm.sh Qwen/Qwen3-8B -- --tensor-parallel-size 8 --max-model-len 32768 --reasoning-parser qwen3
END
}

fail() {
  printf 'tpu_vm.sh: %s\n' "$1" >&2
  exit 2
}

run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  if [[ $dry_run == no ]]; then
    "$@"
  fi
}

# TPU VM images for Ubuntu 22.04 come with Python 3.10.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.14 python3.13 python3.12 python3; do
    if [[ -n $candidate ]] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "Python 3.12 or newer with venv is needed; install one, for example with
  sudo add-apt-repository --yes ppa:deadsnakes/ppa && sudo apt-get install --yes python3.12-venv
or name it: PYTHON=/path/to/python3.12 scripts/tpu_vm.sh"
}

venv=$HOME/jaxserve-venv
extra=tpu
serves=yes
dry_run=no
model=demo
flags=()

while (($#)); do
  case $1 in
    --venv | --extra)
      (($# > 1)) || fail "$1 needs a value"
      if [[ $1 == --venv ]]; then venv=$2; else extra=$2; fi
      shift 2
      ;;
    --install-only) serves=no && shift ;;
    --dry-run) dry_run=yes && shift ;;
    --help | -h) usage && exit 0 ;;
    --) shift && flags=("$@") && break ;;
    -*) fail "unknown option $1; --help lists them, and flags of the server come after --" ;;
    *) model=$1 && shift ;;
  esac
done
[[ $extra =~ ^(tpu|none)$ ]] || fail "--extra must be tpu or none, got $extra"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
package=$root
platform=cpu
if [[ $extra == tpu ]]; then
  package="${root}[tpu]"
  platform=tpu,cpu
fi

if [[ ! -x $venv/bin/python ]]; then
  python=$(find_python)
  run "$python" -m venv "$venv"
fi
run "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package"

# JAX takes the CPU when it finds no TPU, unless it is told which platforms it must have.
run env JAX_PLATFORMS="$platform" "$venv/bin/python" -c \
  'import jax; print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")'

if [[ $serves == yes ]]; then
  host=127.0.0.1
  if [[ -n ${JAXSERVE_API_KEY:-} ]]; then
    host=0.0.0.0
  fi
  # exec: signals must reach the server, which drains on SIGTERM.
  run exec env JAX_PLATFORMS="$platform" "$venv/bin/jaxserve" serve "$model" --host "$host" "${flags[@]}"
fi
