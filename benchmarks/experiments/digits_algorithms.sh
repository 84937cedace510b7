#!/bin/sh
# Compare four algorithms on handwritten digits with 1 and 2 workers: 5 repeats of each, one run at a time.
# It takes about 20 minutes on 2 cores. Run it in a checkout without local changes:
#
#     benchmarks/experiments/digits_algorithms.sh
#
# It makes the page docs/results/digits again, with the result folders of all runs in runs.tar.xz.
set -eu
cd "$(dirname "$0")/../.."
page=docs/results/digits
# Outside of the page, so that the checkout does not change before the last run has ended.
folder=$(mktemp -d)
for algorithm in centralized_sgd power_sgd ef_sign_sgd local_sgd; do
    mlbench run "$(echo "$algorithm" | tr _ -)" 1 2 --task 1a --num-cpus 1 --repeats 5 --exclusive --replace --wait \
        --output "$folder/$algorithm" -- --dataset digits --channels-last --optimizer "$algorithm"
done
rm -rf "$page"
mkdir -p "$page"
for run in "$folder"/*/*/; do
    mkdir -p "$page/runs"
    mv "$run" "$page/runs/"
done
rm -rf "$folder"
cd "$page"
mlbench results verify runs
mlbench results collect runs --output . --title "Four algorithms on handwritten digits" \
    --command "benchmarks/experiments/digits_algorithms.sh"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf runs.tar.xz runs
rm -r runs
# The links led into the folder that is packed now.
sed -i -E 's|\[([^]]+)\]\(runs/[^)]*\)|\1|' index.md
printf '\n[runs.tar.xz](runs.tar.xz) has the result folder of each run.\n' >> index.md
