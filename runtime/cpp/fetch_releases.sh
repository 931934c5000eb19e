#!/bin/sh
# Installs several releases of ONNX Runtime, each in an environment of its own, for the test that one
# binary runs on all of them: `sh runtime/cpp/fetch_releases.sh [PYTHON]`.
set -eu

python=${1:-python3}
folder=$(dirname "$0")/../../build/ort-releases
for release in 1.30.0 1.31.1 1.32.0; do
  environment=$folder/$release
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  # Its dependencies are those of the Python interface, which is not used.
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    "onnxruntime==$release"
  echo "$environment: onnxruntime $release"
done
