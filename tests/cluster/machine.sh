#!/bin/bash
# Builds a network of nodes, and remains their first process. To be run as root in PID, mount, network
# and UTS namespaces of its own, which end with this process: machine.sh FOLDER NODE...
#
# Each node has PID, mount, network, UTS and IPC namespaces, a host name, an address in 10.99.1.0/24, an
# sshd, FOLDER/scratch and /dev/shm of its own. It sees all other folders of this machine.
set -euo pipefail
folder=$1
shift

mount -t tmpfs tmpfs /run
mkdir -p /run/sshd "$folder"/{etc,scratch}
ssh-keygen -q -t ed25519 -N '' -f "$folder/etc/key"
cat >"$folder/etc/ssh_config" <<END
IdentityFile $folder/etc/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
END
cp /etc/passwd /etc/shadow "$folder/etc"
sed -i 's/^root:[^:]*/root:*/' "$folder/etc/shadow" # sshd rejects a locked account
grep -q '^sshd:' /etc/passwd || echo 'sshd:x:999:65534::/run/sshd:/usr/sbin/nologin' >>"$folder/etc/passwd"
echo '127.0.0.1 localhost' >"$folder/etc/hosts"
number=0
for node; do
  number=$((number + 1))
  echo "10.99.1.$number $node" >>"$folder/etc/hosts"
done
for name in passwd shadow hosts; do mount --bind "$folder/etc/$name" "/etc/$name"; done
mount --bind "$folder/etc/ssh_config" /etc/ssh/ssh_config

ip link set lo up
ip link add bridge type bridge
ip link set bridge up
number=0
for node; do
  number=$((number + 1))
  ip netns add "$node"
  ip link add "to-$node" type veth peer name eth0 netns "$node"
  ip link set "to-$node" master bridge up
  ip -n "$node" address add "10.99.1.$number/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" link set lo up
  mkdir -p "$folder/$node"
  nsenter "--net=/run/netns/$node" unshare --pid --fork --kill-child --mount-proc --uts --mount --ipc \
    bash -euc '
      hostname "$2"
      mount --bind "$1/$2" "$1/scratch"
      mount -t tmpfs tmpfs /dev/shm
      /usr/sbin/sshd -f /dev/null -h "$1/etc/key" -o AuthorizedKeysFile="$1/etc/key.pub" \
        -o PermitRootLogin=yes -o StrictModes=no -o UsePAM=no -o PidFile=none
      sleep 3600 & touch "$1/scratch/ready"
      while :; do wait; sleep 3600 & done  # and reap the orphans of the node
    ' bash "$folder" "$node" </dev/null &
done
for node; do
  until [ -e "$folder/$node/ready" ]; do
    kill -0 $(jobs -p) # a node that could not start ends this machine, too
    sleep 0.05
  done
done
echo ready
wait
