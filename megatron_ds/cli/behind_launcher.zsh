_megatron_ds_behind_launcher() {
  local place name
  for ((place = 2; place < CURRENT; place++)); do
    name=_shtab_${${words[place]:t}//[^[:alnum:]]/_}
    if (( $+functions[$name] )); then
      shift $((place - 1)) words
      (( CURRENT -= place - 1 ))
      $name
      return
    fi
  done
  _default
}
compdef _megatron_ds_behind_launcher LAUNCHERS
