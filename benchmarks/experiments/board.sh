#!/bin/sh
# Make the board of all results in docs/results again. The scripts that publish a result end with it.
set -eu
cd "$(dirname "$0")/../.."
mlbench results board docs/results --output docs/results/board
# The page of the documentation is the one in Markdown.
rm docs/results/board/index.html
