#!/usr/bin/env bash
# Fetches the data that some tests read into a cache outside the repository; those tests skip where it is absent.
# The cache is $SPOTLIGHTS_TEST_DATA, by default ~/.cache/spotlights/tests.
set -euo pipefail

cache=${SPOTLIGHTS_TEST_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/spotlights/tests}
mkdir -p "$cache"

# Fashion-MNIST (MIT): 60,000 + 10,000 grey images, from Debian's package.
if [ ! -d "$cache/fashion-mnist" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "fetch.sh: fashion-mnist left out: it comes from a Debian package and there is no apt-get" >&2
        exit 0
    fi
    download=$(mktemp -d)
    chmod 755 "$download"  # apt fetches as another user
    trap 'rm -rf "$download"' EXIT
    [ "$(id -u)" != 0 ] || apt-get -qq update
    (cd "$download" && apt-get -qq download dataset-fashion-mnist=0.0~git20200523.55506a9-1)
    echo "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0  $(ls "$download"/*.deb)" | sha256sum -c --quiet
    dpkg-deb -x "$download"/*.deb "$download/root"
    mv "$download/root/usr/share/datasets/fashion-mnist" "$cache/fashion-mnist"
fi
echo "test data: $cache"
