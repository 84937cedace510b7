#!/bin/sh
# Make the page docs/results/NAME of all result folders below FOLDER, and pack them beside it:
#
#     benchmarks/experiments/publish.sh NAME FOLDER TITLE COMMAND
#
# COMMAND made the runs. The text of NAME_notes.txt beside this script, if there is one, ends the page.
set -eu
name=$1
folder=$2
title=$3
command=$4
cd "$(dirname "$0")/../.."
page=docs/results/$name
mlbench results verify "$folder"
rm -rf "$page"
mkdir -p "$page/runs"
find "$folder" -name result.json | while read -r result; do
    cp -r "$(dirname "$result")" "$page/runs/"
done
cd "$page"
mlbench results collect runs --output . --title "$title" --command "$command"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf runs.tar.xz runs
rm -r runs
# The links led into the folder that is packed now.
sed -i -E 's|\[([^]]+)\]\(runs/[^)]*\)|\1|' index.md
printf '\n[runs.tar.xz](runs.tar.xz) has the result folder of each run.\n' >> index.md
cd - > /dev/null
if [ -f "benchmarks/experiments/${name}_notes.txt" ]; then
    printf '\n' >> "$page/index.md"
    cat "benchmarks/experiments/${name}_notes.txt" >> "$page/index.md"
fi
