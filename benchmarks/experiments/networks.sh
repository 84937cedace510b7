#!/bin/sh
# Sweep algorithms over networks, and make the page docs/results/NAME from it. NAME is digits_networks or language_networks.
# FOLDER keeps the runs: start the same command again if it was interrupted. Nothing else should run on the machine.
# Run it in a checkout without local changes:
#
#     benchmarks/experiments/networks.sh NAME FOLDER
set -eu
name=$1
folder=$2
cd "$(dirname "$0")/../.."
mlbench sweep "benchmarks/experiments/$name.toml" --output "$folder"
page=docs/results/$name
rm -rf "$page"
mkdir -p "$page"
for file in "$folder"/*.md "$folder"/*.png "$folder"/*.svg "$folder"/*.csv "$folder"/*.json "$folder/sweep.toml"; do
    cp "$file" "$page"
done
# Hundreds of folders are small when packed together. The choice of a tuned sweep follows from its trials, also failed ones.
folders=$(cd "$folder" && ls -d runs tuning failed 2>/dev/null || true)
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf "$page/runs.tar.xz" -C "$folder" $folders
sed -i -e 's|the folder `runs` has the result folder of each run|[runs.tar.xz](runs.tar.xz) has the result folder of each run|' \
    -e 's|the folder `tuning` its run|[runs.tar.xz](runs.tar.xz) its run|' "$page/index.md"
