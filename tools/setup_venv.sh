#!/bin/sh
# Create a virtual environment with Kiln installed in place: setup_venv.sh FOLDER serve|dev
# torch comes first, alone: its CPU build where there is no NVIDIA driver, so that no other
# package's requirement pulls gigabytes of CUDA libraries onto a machine that cannot use them.
set -eu
folder=$1 purpose=$2
pip="$folder/bin/python -m pip --disable-pip-version-check"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $PYTHON is older than 3.11; run: make PYTHON=python3.12 …" >&2
  exit 1
}
[ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"

extras=""
if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1; then
  echo "Installing torch for CUDA, then Kiln, into $folder"
  $pip install -c constraints.txt torch
  extras="cuda"
else
  echo "No NVIDIA driver: installing the CPU build of torch, then Kiln, into $folder"
  $pip install -c constraints.txt "torch==2.13.0"
fi
[ "$purpose" = dev ] && extras="cuda,dev"
$pip install -c constraints.txt -e ".${extras:+[$extras]}"
