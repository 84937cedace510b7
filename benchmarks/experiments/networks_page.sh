#!/bin/sh
# Make the page docs/results/NAME again from its packed runs, without running them. NAME is digits_networks or
# language_networks:
#
#     benchmarks/experiments/networks_page.sh NAME
set -eu
name=$1
cd "$(dirname "$0")/../.."
page=docs/results/$name
folder=$(mktemp -d)
tar -xJf "$page/runs.tar.xz" -C "$folder"
cp "$page/sweep.toml" "$folder"
python -c "import sys, pathlib; from mlbench_core.sweep.page import write_page; write_page(pathlib.Path(sys.argv[1]), report=print)" "$folder"
for file in "$folder"/*.md "$folder"/*.png "$folder"/*.svg "$folder"/*.csv "$folder/results.json"; do
    cp "$file" "$page"
done
rm -rf "$folder"
sed -i 's|the folder `runs` has the result folder of each run|[runs.tar.xz](runs.tar.xz) has the result folder of each run|' \
    "$page/index.md"
# These runs are older than the rules of the page.
cat >> "$page/index.md" << 'END'

## Limits of these runs

The runs are of November 26, 2026, version 4.0.0.dev0, and were not run again. Their limit counted the time since the start
of the workers, with start and validations, so methods that spend more time outside of training were stopped earlier in
training. The page therefore judges all runs of a network and a number of workers up to one common training time. Averages of the workers' weights that were made
for a validation were not charged in these runs, and the number of exchanges of each run was not measured. The methods that
average rarely (MuLoCo, DiLoCo, streaming DiLoCo, local SGD) profit from both.
END
