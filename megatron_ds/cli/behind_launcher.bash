_megatron_ds_behind_launcher() {
  local place name
  for ((place = 1; place < COMP_CWORD; place++)); do
    name=${COMP_WORDS[place]##*/}
    name=_shtab_${name//[^[:word:]]/_}
    if declare -F "$name" > /dev/null; then
      COMP_WORDS=("${COMP_WORDS[@]:place}")
      ((COMP_CWORD -= place))
      "$name"
      return
    fi
  done
}
complete -o bashdefault -o default -F _megatron_ds_behind_launcher LAUNCHERS
