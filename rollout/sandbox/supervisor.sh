# Keeps one shell on one stream. It is PID 1 of a sandbox, and the parent of the shell of any other user.
#
# Written for dash, bash and busybox ash alike, with builtins alone: nothing that the image holds, and no
# limit on processes, can keep it from its work. It is given in its environment, out of its children's sight:
#
#   rc_loop      the text of shell_loop.sh
#   rc_seconds   seconds until it ends by itself; empty for another user's shell, which ends with its sandbox
#
# and as the first line on stdin a secret: what follows it on stdout or stderr is this script's word.
#
# It says, each a line behind the secret:
#
#   ready PID KIND                              KIND is bash or sh: what this script runs in
#   ended NUMBER STATUS OOM CLEARED             a shell ended; OOM kills so far; 1 if by signal 44
#   interrupted                                 signal 43 is done
#   oom COUNT                                   the answer to signal 45
#
# The child that takes blocks of text and evaluates them is a fork of this process, so that nothing in the
# image has a say in what it does until the host has it replace itself with the agent's shell (rc_become).

IFS= read -r rc_key
rc_loop_text=$rc_loop rc_limit=$rc_seconds
unset rc_text rc_loop rc_seconds
exec 7<&0 8>&1 9>&2 </dev/null >/dev/null 2>&1
# Job control keeps SIGINT from being ignored in all that the agent starts. dash and ash want a terminal for
# it, so that in an image without bash SIGINT stays ignored there.
set -m

# What a trap runs in dash and ash forgets a status where another trap comes in between: what `$?` was before both is
# put in its place, so that any condition may turn out wrong. There, traps only note what is to be done.
rc_on() {
  case ${BASH_VERSION-} in
    ?*) trap "$2" "$1" ;;
    *) trap "rc_notes=\"\${rc_notes%\" $2\"} $2\" rc_waits=rc_noted" "$1" ;;
  esac
}

# A note that comes after the last look at them ends the wait all the same, but not twice on end: while children die
# faster than they are noted, the shell is waited for too.
rc_noted() {
  rc_noted_last=1
  return 145
}

rc_wait() {
  rc_waits=wait
  rc_serve
  [ -z "$rc_noted_last" ] || rc_waits=wait
  rc_noted_last=''
  "$rc_waits" "$rc_shell"
  rc_status=$?
}

rc_serve() {
  rc_taken=$rc_notes rc_notes=''
  for rc_work in $rc_taken; do "$rc_work"; done
}

rc_say() {
  printf '%s %s\n' "$rc_key" "$*" >&8
  printf '%s %s\n' "$rc_key" "$*" >&9
}

# The number of processes that the kernel killed for the sandbox's memory limit: cgroup v1, then v2.
rc_oom() {
  rc_kills=0
  for rc_file in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events; do
    [ -r "$rc_file" ] || continue
    while read -r rc_name rc_value; do
      [ "$rc_name" = oom_kill ] && rc_kills=$rc_value
    done <"$rc_file"
  done
}

# Ends at the deadline, and has a timer that wakes this process then: whoever kills it, there is a new one. It
# is a trap too, and keeps out of what others are in the middle of.
rc_tick() {
  [ -n "$rc_deadline" ] && [ -z "$rc_busy" ] || return 0
  read -r rc_now rc_rest </proc/uptime
  rc_left=$((rc_deadline - ${rc_now%%.*}))
  # In a trap, bash forgets the status of its own exit.
  [ "$rc_left" -gt 0 ] || exec sh -c 'exit 124'
  rc_look "$rc_timer" && case $rc_state in Z | X) ;; *) return 0 ;; esac
  # Where `sleep` is gone, or is not what it was, each ends at once and asks for the next: after some, one a second.
  [ "$rc_ticks" -lt 20 ] || [ "$rc_left" != "$rc_ticked" ] || return 0
  rc_ticks=$((rc_ticks + 1)) rc_ticked=$rc_left
  command eval 'sleep "$rc_left" 7<&- 8>&- 9>&- & rc_timer=$!'
}

rc_spawn() {
  rc_number=$((rc_number + 1))
  # A timer that is started in between would be taken for the shell: $! is the last child of either.
  rc_busy=1$rc_busy
  command eval 'rc_shell_main <&7 >&8 2>&9 7<&- 8>&- 9>&- & rc_shell=$!'
  rc_spawned=$?
  rc_busy=${rc_busy#1}
  return "$rc_spawned"
}

# A block is a line with the child's number, text, and an empty line. What a dead child left unread is passed
# over. Whoever goes past the memory limit is killed before PID 1 is.
rc_shell_main() {
  trap - CHLD INT 43 44 45
  set +m
  { echo 1000 >/proc/self/oom_score_adj; cd "$rc_home" || cd /; } 2>/dev/null
  while IFS= read -r rc_line; do
    [ "$rc_line" = "rollcage $rc_number" ] || continue
    rc_text=
    while IFS= read -r rc_line && [ -n "$rc_line" ]; do
      rc_text="$rc_text$rc_line
"
    done
    eval "$rc_text"
  done
  exit 125
}

rc_become() {
  export rc_text="$rc_loop_text"
  command -v bash >/dev/null && exec bash -c 'eval "$rc_text"' bash
  exec sh -c 'eval "$rc_text"' sh
}

# State, parent and session of process $1.
rc_look() {
  rc_stat=
  while read -r rc_line; do rc_stat=$rc_stat$rc_line; done <"/proc/$1/stat"
  case $rc_stat in *')'*) ;; *) return 1 ;; esac
  set -- ${rc_stat##*)}
  rc_state=$1 rc_parent=$2 rc_session=$4
}

# The soft limit of the resident set of process $1. The shell gives it another number for each command, and
# what the command starts inherits it: Linux has ignored this limit since 2.4.30.
rc_read_mark() {
  rc_mark=
  while read -r rc_a rc_b rc_c rc_d rc_rest; do
    case "$rc_a $rc_b $rc_c" in 'Max resident set') rc_mark=$rc_d && return ;; esac
  done <"/proc/$1/limits"
}

# Kills what the shell's command in hand has started: what bears its number and is in the shell's session or
# its direct child, and all their descendants. Daemons (their session is another) and what earlier commands
# left in the background live on. Again until nothing is found, for it may fork meanwhile.
rc_kill_command() {
  rc_look "$rc_shell" || return 0
  rc_read_mark "$rc_shell"
  rc_wanted=$rc_mark rc_own=$rc_session
  for rc_round in 1 2 3 4 5 6 7 8 9 10; do
    rc_found=' ' rc_more=1
    while [ -n "$rc_more" ]; do
      rc_more=
      for rc_pid in /proc/[0-9]*; do
        rc_pid=${rc_pid#/proc/}
        case " $rc_shell $rc_timer $$ 1$rc_found" in *" $rc_pid "*) continue ;; esac
        rc_look "$rc_pid" || continue
        case $rc_state in Z | X) continue ;; esac
        case $rc_found in
          *" $rc_parent "*) ;;
          *)
            [ "$rc_parent" = "$rc_shell" ] || [ "$rc_session" = "$rc_own" ] || continue
            rc_read_mark "$rc_pid"
            [ "$rc_mark" = "$rc_wanted" ] || continue
            ;;
        esac
        rc_found="$rc_found$rc_pid "
        rc_more=1
      done
    done
    [ "$rc_found" != ' ' ] || return 0
    kill -KILL $rc_found
  done
}

# The shell first, so that it drops the rest of the command instead of going on behind what is killed. This and rc_clear
# may come in the middle of each other, of themselves, and of a start: each takes only its own mark off rc_busy.
rc_interrupt() {
  rc_busy=1$rc_busy
  kill -43 "$rc_shell"
  kill -CONT "$rc_shell"
  rc_kill_command
  rc_busy=${rc_busy#1}
  rc_say interrupted
  rc_tick
}

# The kernel lets nobody fork who has been killed, so that one kill is enough.
rc_clear() {
  rc_busy=1$rc_busy rc_others=1
  kill -KILL -1
  while [ -n "$rc_others" ]; do
    rc_others=
    for rc_pid in /proc/[0-9]*; do
      rc_pid=${rc_pid#/proc/}
      [ "$rc_pid" != $$ ] && rc_look "$rc_pid" || continue
      case $rc_state in Z | X) ;; *) rc_others=1 ;; esac
    done
  done
  rc_busy=${rc_busy#1} rc_cleared=1
}

rc_report() {
  rc_oom
  rc_say oom "$rc_kills"
}

rc_notes='' rc_noted_last='' rc_number=0 rc_ends=0 rc_ends_most=1 rc_cleared=0 rc_deadline=''
rc_timer='' rc_ticked='' rc_ticks=0 rc_busy='' rc_home=$PWD
if [ -n "$rc_limit" ]; then
  read -r rc_now rc_rest </proc/uptime
  rc_deadline=$((${rc_now%%.*} + rc_limit))
  rc_on 44 rc_clear
  rc_ends_most=20
fi
# SIGINT has a trap because bash would end by it; the trap is nothing that children inherit.
trap : INT
rc_on CHLD rc_tick
rc_on 43 rc_interrupt
rc_on 45 rc_report
rc_tick
rc_spawn
rc_say ready $$ "${BASH_VERSION:+ba}sh"

while :; do
  rc_wait
  # A trap ends a wait early, and so does a stopped shell under job control.
  while [ "$rc_status" -ne 127 ] && kill -0 "$rc_shell"; do
    rc_tick
    kill -CONT "$rc_shell"
    rc_wait
  done
  rc_serve
  wait "$rc_shell"
  rc_again=$?
  [ "$rc_again" -eq 127 ] || rc_status=$rc_again
  # The stream is at its end: the host is gone, and nobody can ask for anything any more. An agent's own
  # `exit 125` says the same, hence the count.
  case $rc_status in
    125) rc_ends=$((rc_ends + 1)) ;;
    *) rc_ends=0 ;;
  esac
  [ "$rc_ends" -lt "$rc_ends_most" ] || exit 125
  rc_oom
  rc_say ended "$rc_number" "$rc_status" "$rc_kills" "$rc_cleared"
  rc_cleared=0
  rc_tick
  # At the limit on processes a new shell needs room.
  rc_spawn || { kill -KILL -1; rc_spawn; }
done
