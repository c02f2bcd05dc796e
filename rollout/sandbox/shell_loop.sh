# The shell that runs an agent's commands: bash where the image has it, else sh.
#
# Each line on stdin is one frame, written by the host: it sets rc_nonce, rc_in (the command's stdin) and
# rc_command, whose newlines are another byte that rc_join is told. When the command is done, a line of the
# nonce and the exit code goes to stdout and to stderr, so that both are known to be complete. The commands run
# in this very shell, and this loop keeps out of what they may do to it: `exec >file`, `set -e`, `set -x`,
# `break`, functions called like builtins, closed files.

unset rc_text
exec 8>&1 9>&2
set --
rc_nonce='' rc_busy='' rc_signal='' rc_line='' rc_newline='
'
# As in a terminal, each of its jobs is a process group of its own: `kill 0` in a script ends that script. bash
# takes a foreground job's death of SIGINT for its own, then; the shell is replaced.
case ${BASH_VERSION-} in ?*) set -m ;; esac

rc_return() { return "$rc_code"; }

# Splits rc_command at $1 and joins it with newlines: of what all three shells can do, only this is linear.
rc_join() {
  local IFS
  IFS=$1
  case $- in *f*) set -- $rc_command ;; *) set -f && set -- $rc_command && set +f ;; esac
  IFS=$rc_newline
  rc_command=$*
}

# The supervisor sends this at a timeout: drop the rest of the command and go on here. dash and ash unwind to
# `command eval` on an error; bash continues the outermost loop, which a function would not let it reach.
rc_drop_bash='rc_signal=1; case $rc_busy in ?*) case ${FUNCNAME-} in ?*) exit 143 ;; esac; continue 1000 ;; esac'
rc_drop_sh='rc_signal=1; case $rc_busy in ?*) { : "${rc_none:?}"; } 2>/dev/null ;; esac'
case ${BASH_VERSION-} in
  ?*) trap "$rc_drop_bash" 43 ;;
  *) trap "$rc_drop_sh" 43 ;;
esac

# Two loops: a stray `break` of a command ends the inner one.
while :; do
  while
    {
      rc_code=$? rc_busy=''
      case $- in *x*) rc_trace="set -x$rc_newline" && set +x ;; *) rc_trace='' ;; esac
    } 2>/dev/null
    case $rc_nonce in
      ?*)
        command printf '%s %s\n' "$rc_nonce" "$rc_code" >&8
        command printf '%s %s\n' "$rc_nonce" "$rc_code" >&9
        rc_nonce=''
        ;;
    esac
    rc_signal=''
    until IFS= command read -r rc_line; do
      case $rc_signal in ?*) rc_signal='' ;; *) exit 125 ;; esac
    done
  do
    command eval "$rc_line"
    rc_command=$rc_trace$rc_command
    rc_busy=1
    # The command's first $? is the last one's exit code.
    case $rc_code in
      0) command eval "$rc_command" <"$rc_in" 8>&- 9>&- ;;
      *) rc_return || command eval "$rc_command" <"$rc_in" 8>&- 9>&- ;;
    esac
  done
done
