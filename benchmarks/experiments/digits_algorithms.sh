#!/bin/sh
# Compare four algorithms on handwritten digits with 1 and 2 workers: 5 repeats of each, one run at a time.
# It takes about 20 minutes on 2 cores. Run it in a checkout without local changes:
#
#     benchmarks/experiments/digits_algorithms.sh
#
# It makes the page docs/results/digits again, with the result folders of all runs in runs.tar.xz.
set -eu
cd "$(dirname "$0")/../.."
# Outside of the page, so that the checkout does not change before the last run has ended.
folder=$(mktemp -d)
for algorithm in centralized_sgd power_sgd ef_sign_sgd local_sgd; do
    mlbench run "$(echo "$algorithm" | tr _ -)" 1 2 --task 1a --num-cpus 1 --repeats 5 --exclusive --replace --wait \
        --output "$folder/$algorithm" -- --dataset digits --channels-last --optimizer "$algorithm"
done
benchmarks/experiments/publish.sh digits "$folder" "Four algorithms on handwritten digits" \
    benchmarks/experiments/digits_algorithms.sh
rm -rf "$folder"
