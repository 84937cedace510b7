#!/bin/sh
# Train a task with 1 and 2 workers of one core each, once for each seed from 1 to SEEDS, one run at a time:
#
#     benchmarks/experiments/official_runs.sh FOLDER SEEDS --task TASK [OPTIONS OF mlbench run] [-- FLAGS OF THE TASK]
#
# FOLDER keeps the runs; the same command continues after an interruption, and a larger SEEDS adds runs.
# Run it in a checkout without local changes, on a machine that does nothing else.
set -eu
folder=$1
seeds=$2
shift 2
for seed in $(seq 1 "$seeds"); do
    for workers in 1 2; do
        output=$folder/seed$seed-$workers
        if [ -d "$output" ]; then continue; fi
        rm -rf "$output.part"
        # A run that misses its goal or fails is a result as well, but one without a result was interrupted.
        mlbench run "$(basename "$folder")-seed$seed" "$workers" --num-cpus 1 --seed "$seed" --exclusive --replace --wait \
            --output "$output.part" "$@" || echo "seed $seed, $workers workers: exit status $?"
        if [ -z "$(find "$output.part" -name result.json)" ]; then exit 1; fi
        mv "$output.part" "$output"
    done
done
