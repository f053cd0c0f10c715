#!/usr/bin/env bash
# Installs jaxserve on a TPU VM and serves a model there. Run it on the VM, from a checkout. With --workers it runs
# elsewhere, where gcloud is, and starts itself on all VMs of a slice.
set -euo pipefail

usage() {
  cat <<'END'
usage: scripts/tpu_vm.sh [options] [MODEL] [-- FLAGS OF jaxserve serve]

Installs jaxserve with JAX for TPUs into a virtual environment, checks that JAX sees the chips, and serves. A second
run finds everything installed. MODEL is a directory, a Hugging Face model id, or "demo" (the default).

  --venv DIR       the virtual environment (default: ~/jaxserve-venv)
  --extra NAME     extra to install: tpu (default), or none for a trial on a CPU
  --workers NAME   all VMs of the slice NAME, by gcloud: the checkout is copied to each of them, and each runs this script.
                   Set JAXSERVE_CLUSTER_TOKEN; worker 0 serves, and the others follow it
  --zone ZONE      the slice's zone (with --workers)
  --chips N        the slice's chips, which worker 0 gives to --tensor-parallel-size (with --workers)
  --install-only   install and check, and do not serve
  --dry-run        print the commands instead of running them
  --help           print this

The server listens on 127.0.0.1 unless JAXSERVE_API_KEY is set; then on all addresses. From elsewhere, without opening
a port:

  gcloud compute tpus tpu-vm ssh NAME --zone ZONE -- -L 8000:127.0.0.1:8000

Examples, for one VM of eight chips, and for the four VMs of a v5e-16:

  scripts/tpu_vm.sh Qwen/Qwen3-8B -- --tensor-parallel-size 8 --max-model-len 32768 --reasoning-parser qwen3

  export JAXSERVE_CLUSTER_TOKEN=$(openssl rand -hex 32)
  scripts/tpu_vm.sh --workers NAME --zone ZONE --chips 16 Qwen/Qwen3-32B
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

# Runs a gcloud command that takes --worker, for the slice and its zone.
run_gcloud() {
  run gcloud compute tpus tpu-vm "$@" --zone "$zone" --worker all
}

# Copies the checkout to all workers and starts this script on each. Every node must have the same version, so no
# worker fetches its own. Secrets go in a file: others can read the arguments of a process.
run_on_workers() {
  local checkout=jaxserve-checkout command
  [[ -n $zone ]] || fail "--workers needs --zone; gcloud compute tpus tpu-vm list --zone - shows where the slice is"
  [[ $chips =~ ^[1-9][0-9]*$ ]] || fail "--workers needs --chips, the number of chips in the slice: 16 for v5litepod-16"
  [[ -n ${JAXSERVE_CLUSTER_TOKEN:-} ]] || fail "JAXSERVE_CLUSTER_TOKEN is not set: the workers prove it to each other; run
  export JAXSERVE_CLUSTER_TOKEN=\$(openssl rand -hex 32)"
  if [[ $dry_run == no ]]; then
    command -v gcloud >/dev/null || fail "gcloud is needed here; install it: https://cloud.google.com/sdk/docs/install"
  fi
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT # which knows no local variable
  printf 'export JAXSERVE_CLUSTER_TOKEN=%q\n' "$JAXSERVE_CLUSTER_TOKEN" >"$folder/jaxserve-secrets"
  if [[ -n ${JAXSERVE_API_KEY:-} ]]; then
    printf 'export JAXSERVE_API_KEY=%q\n' "$JAXSERVE_API_KEY" >>"$folder/jaxserve-secrets"
  fi
  run tar -czf "$folder/jaxserve.tar.gz" --exclude=.git --exclude='.venv*' --exclude=.wheels -C "$root" .
  run_gcloud scp "$folder/jaxserve.tar.gz" "$folder/jaxserve-secrets" "$name:"
  command="source ./jaxserve-secrets && rm jaxserve-secrets && "
  command+="mkdir -p $checkout && tar -xzf jaxserve.tar.gz -C $checkout && "
  command+="exec bash $checkout/scripts/tpu_vm.sh --extra $extra "
  if [[ $serves == no ]]; then
    command+=--install-only
  else
    command+="--of-slice $chips $(printf '%q ' "$model" -- "${flags[@]}")"
  fi
  run_gcloud ssh "$name" --command "bash -c $(printf '%q' "$command")"
}

# Prints the number of this worker in its slice, as the VM's metadata say.
find_worker() {
  local found=${TPU_WORKER_ID:-}
  if [[ -z $found ]]; then
    found=$(curl --silent --fail --header 'Metadata-Flavor: Google' \
      http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number) ||
      fail "the number of this worker is unknown: its metadata have no agent-worker-number; set TPU_WORKER_ID"
  fi
  printf '%s\n' "$found"
}

venv=$HOME/jaxserve-venv
extra=tpu
serves=yes
dry_run=no
model=demo
flags=()
name=''
zone=''
chips=''
of_slice='' # chips of the slice that this worker belongs to; given by --workers

while (($#)); do
  case $1 in
    --venv | --extra | --workers | --zone | --chips | --of-slice)
      (($# > 1)) || fail "$1 needs a value"
      case $1 in
        --venv) venv=$2 ;;
        --extra) extra=$2 ;;
        --workers) name=$2 ;;
        --zone) zone=$2 ;;
        --chips) chips=$2 ;;
        --of-slice) of_slice=$2 ;;
      esac
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
if [[ -n $name ]]; then
  run_on_workers
  exit
fi
[[ -z $zone$chips ]] || fail "--zone and --chips go with --workers; on a VM itself, leave them out"

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

if [[ -n $of_slice ]]; then
  # No check of the chips: JAX waits there until all workers of the slice ask, so it would only fail twice.
  worker=$(find_worker)
  if [[ $worker == 0 ]]; then
    host=127.0.0.1
    if [[ -n ${JAXSERVE_API_KEY:-} ]]; then host=0.0.0.0; fi
    flags=(--host "$host" --tensor-parallel-size "$of_slice" "${flags[@]}")
  else
    flags=() # all other options are rank 0's
  fi
  if [[ -z ${JAXSERVE_API_KEY:-} ]]; then unset JAXSERVE_API_KEY; fi
  run exec env JAX_PLATFORMS="$platform" "$venv/bin/jaxserve" serve "$model" "${flags[@]}"
  exit
fi

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
