#!/bin/sh
# Builds the libFuzzer targets and runs each: `sh runtime/cpp/fuzz/run.sh [RUNS] [TARGET …]`.
#
# Needs clang with its libFuzzer. A target stops at the first input that crashes it, which it leaves
# in the folder of the build; inputs that reach new code are kept there as well, beside the seeds.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
build=$here/../../../build/cpp-fuzz
runs=${1:-1000000}
[ $# -gt 0 ] && shift
targets=${*:-manifest vocab_map defaults options safetensors tokenizer}

# Debian's compilers may have no name but one with their number.
compiler=
for name in clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14; do
  [ -n "$compiler" ] || compiler=$(command -v "$name" || true)
done
if [ -z "$compiler" ]; then
  echo "clang++ was expected on the path, which brings libFuzzer, and is not there" >&2
  exit 1
fi

cmake -S "$here/.." --preset fuzz -DCMAKE_CXX_COMPILER="$compiler" > /dev/null
for target in $targets; do
  cmake --build "$build" --target "fuzz_$target" > /dev/null
  corpus=$build/corpus/$target
  mkdir -p "$corpus"
  # What has no seeds is made of bytes alone, of which a first check wants some.
  [ -d "$here/seeds/$target" ] || head -c 1024 /dev/zero > "$corpus/zeros"
  echo "$target: $runs runs"
  (cd "$build" && "fuzz/fuzz_$target" -runs="$runs" -max_len=4096 -print_final_stats=1 \
    -print_funcs=0 -verbosity=0 "$corpus" $([ -d "$here/seeds/$target" ] && echo "$here/seeds/$target"))
done
