#!/bin/sh
# Fetches ONNX Runtime's C headers: `sh runtime/cpp/fetch_headers.sh [FOLDER]`.
#
# They are not copied into this repository. No PyPI or Debian package carries them; this one of the
# npm registry does, and its checksum is pinned. The headers are Microsoft's, under the MIT licence,
# of C API version 29; the library that is loaded at run time may be older or newer.
set -eu

package=com.github.asus4.onnxruntime@0.4.9
sha256=e59788788818fdde1b2e522e766a21ba0f7d8391de55737abf81e32cc801785d
inside=package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64/onnxruntime.framework/Headers
headers="onnxruntime_c_api.h onnxruntime_ep_c_api.h onnxruntime_error_code.h"

# Where CMake looks by default.
folder=${1:-$(dirname "$0")/../../build/ort-headers}

missing=
for name in $headers; do
  [ -f "$folder/$name" ] || missing=$name
done
if [ -z "$missing" ]; then
  echo "$folder: the headers are there"
  exit 0
fi

if ! command -v npm > /dev/null; then
  echo "npm was expected on the path to fetch the headers and is not there; install it, or pass" \
    "CMake -DONNXRUNTIME_INCLUDE_DIR=FOLDER with headers that you have" >&2
  exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# `npm pack` downloads, and runs nothing of the package.
archive=$scratch/$(cd "$scratch" && npm pack "$package" --silent)
if ! echo "$sha256  $archive" | sha256sum --check --quiet; then
  echo "$package: sha256 $sha256 was expected, another was found; nothing was unpacked" >&2
  exit 1
fi
mkdir -p "$folder"
for name in $headers; do
  tar -xzOf "$archive" "$inside/$name" > "$scratch/$name"
  mv "$scratch/$name" "$folder/$name"
done
echo "$folder: $headers"
