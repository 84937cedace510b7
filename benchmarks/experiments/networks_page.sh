#!/bin/sh
# Make the page docs/results/NAME of a sweep from the runs in FOLDER; without FOLDER, again from the packed runs of the page:
#
#     benchmarks/experiments/networks_page.sh NAME [FOLDER]
set -eu
name=$1
folder=${2:+$(realpath "$2")}
cd "$(dirname "$0")/../.."
page=docs/results/$name
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
new=$work/new
mkdir "$new"
if [ -n "$folder" ]; then
    # Hundreds of folders are small when packed together. The choice of a tuned sweep follows from its trials, also failed ones.
    folders=$(cd "$folder" && ls -d runs tuning failed 2>/dev/null || true)
    tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf "$new/runs.tar.xz" -C "$folder" $folders
    cp "$folder/sweep.toml" "$new"
else
    cp "$page/runs.tar.xz" "$page/sweep.toml" "$new"
fi
# The page follows from what is packed, so that everybody can make it again.
mkdir "$work/sweep"
tar -xJf "$new/runs.tar.xz" -C "$work/sweep"
cp "$new/sweep.toml" "$work/sweep"
python -c "import sys, pathlib; from mlbench_core.sweep.page import write_page; write_page(pathlib.Path(sys.argv[1]), report=print)" "$work/sweep"
for file in "$work"/sweep/*.md "$work"/sweep/*.png "$work"/sweep/*.svg "$work"/sweep/*.csv "$work"/sweep/*.json; do
    cp "$file" "$new"
done
sed -i -e 's|the folder `runs` has the result folder of each run|[runs.tar.xz](runs.tar.xz) has the result folder of each run|' \
    -e 's|the folder `tuning` its run|[runs.tar.xz](runs.tar.xz) its run|' "$new/index.md"
# The old page stays until the new one is complete.
rm -rf "$page"
mv "$new" "$page"
benchmarks/experiments/board.sh
