#!/bin/sh
# Run the sweep NAME.toml of this folder, and make the page docs/results/NAME from it. FOLDER keeps the runs: start the same
# command again if it was interrupted. Nothing else should run on the machine, unless the sweep models its times.
# MLBENCH_FORK=1 starts workers in a moment. Run it in a checkout without local changes:
#
#     benchmarks/experiments/networks.sh NAME FOLDER
set -eu
name=$1
folder=$(realpath -m "$2")
cd "$(dirname "$0")/../.."
mlbench sweep "benchmarks/experiments/$name.toml" --output "$folder"
benchmarks/experiments/networks_page.sh "$name" "$folder"
