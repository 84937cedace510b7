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
for file in "$folder"/*.md "$folder"/*.png "$folder"/*.svg "$folder"/*.csv "$folder"/*.json; do
    cp "$file" "$page"
done
rm -rf "$folder"
sed -i -e 's|the folder `runs` has the result folder of each run|[runs.tar.xz](runs.tar.xz) has the result folder of each run|' \
    -e 's|the folder `tuning` its run|[runs.tar.xz](runs.tar.xz) its run|' "$page/index.md"
