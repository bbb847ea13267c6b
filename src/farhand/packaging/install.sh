# Installs Farhand for this user and connects the machine to the gateway that this script comes from. The lines above
# say where from. Everything goes into ~/.local, and `farhand uninstall` removes it.
set -eu

# One function, called by the last line: of a script that arrives incompletely, nothing runs.
main() {
    say() { printf 'farhand: %s\n' "$1" >&2; }
    fail() { say "$1"; exit 1; }

    data="${XDG_DATA_HOME:-$HOME/.local/share}/farhand"
    bin="$HOME/.local/bin"
    umask 077
    mkdir -p "$data" "$bin"
    work=$(mktemp -d "$data/install.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM

    describe='import sys, sysconfig; print("Python %d.%d on %s" % (sys.version_info[0], sys.version_info[1], sysconfig.get_platform()))'
    python=
    usable=
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        command -v "$name" >/dev/null 2>&1 || continue
        found=$("$name" -c "$describe" 2>/dev/null) || continue
        if [ "$found" = "$PLATFORM" ]; then
            python=$name
            break
        fi
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            usable=${usable:-$name}
        fi
    done

    if [ -n "$python" ]; then
        say "downloading Farhand from the gateway"
        $FETCH -o "$work/$BUNDLE" "$SOURCE/$BUNDLE" || fail "the download failed; make a new code with \`farhand node pair\`"
        mv "$work/$BUNDLE" "$data/$BUNDLE"
        # The first start unpacks it.
        "$python" "$data/$BUNDLE" --version >&2
        program=$(ls -td "$data"/bundle-*/bin/farhand | head -n 1)
    else
        # Another Python or system than the gateway's: what Farhand needs comes from the package index.
        say "downloading Farhand from the gateway; what it needs comes from the package index"
        $FETCH -o "$work/$WHEEL" "$SOURCE/$WHEEL" || fail "the download failed; make a new code with \`farhand node pair\`"
        if [ -n "$usable" ]; then
            "$usable" -m venv --clear "$data/venv" || fail "cannot make an environment: install python3-venv, then try again"
            "$data/venv/bin/python" -m pip install --disable-pip-version-check --quiet "$work/$WHEEL" ||
                fail "pip could not install Farhand; see the lines above"
        elif command -v uv >/dev/null 2>&1; then
            uv venv --quiet --clear --python '>=3.11' "$data/venv" && uv pip install --quiet --python "$data/venv/bin/python" "$work/$WHEEL" ||
                fail "uv could not install Farhand; see the lines above"
        else
            fail "Farhand needs Python 3.11 or newer, and this machine has none; install it, then run the line again"
        fi
        program="$data/venv/bin/farhand"
    fi
    ln -sf "$program" "$bin/farhand"
    rm -rf "$work"
    trap - EXIT INT TERM

    case ":$PATH:" in
        *":$bin:"*) ;;
        *) say "installed $bin/farhand; add $bin to your PATH to call it farhand" ;;
    esac
    exec "$program" join "$CODE" "$@"
}

main "$@"
