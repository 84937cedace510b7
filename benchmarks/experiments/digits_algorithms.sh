#!/bin/sh
# Compare four algorithms on handwritten digits with 1 and 2 workers: 5 repeats of each, one run at a time.
# It takes about 20 minutes on 2 cores, and makes the page docs/results/digits/index.md with its tables and figures.
#
#     benchmarks/experiments/digits_algorithms.sh [FOLDER]
#
# The result folders of the runs are in FOLDER (default: digits-algorithms).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-digits-algorithms}
for algorithm in centralized_sgd power_sgd ef_sign_sgd local_sgd; do
    name=$(echo "$algorithm" | tr _ -)
    mlbench run "$name" 1 2 --task 1a --num-cpus 1 --repeats 5 --exclusive --replace --wait --output "$folder/$name" \
        -- --dataset digits --channels-last --optimizer "$algorithm"
done
mlbench results verify "$folder"
mlbench results collect "$folder" --output "$here/../../docs/results/digits" \
    --title "Four algorithms on handwritten digits" --command "benchmarks/experiments/digits_algorithms.sh"
