"""The server's page for browsers: a prompt, a button, the text."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>megatron_ds</title>
<style>
  body { font: 1rem/1.5 system-ui, sans-serif; max-width: 45rem; margin: 2rem auto }
  body { padding: 0 1rem }
  textarea { width: 100%; box-sizing: border-box; font: inherit }
  input { width: 5rem; font: inherit }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit }
  .error { color: #b00020 }
</style>
<form>
  <p><textarea id="prompt" rows="5" placeholder="Prompt" aria-label="Prompt" autofocus></textarea>
  <p><label>tokens <input id="tokens" type="number" min="1" value="64"></label>
     <label>temperature
     <input id="temperature" type="number" min="0.01" max="100" step="any" value="1"></label>
     <button>Continue</button>
</form>
<pre id="text"></pre>
<script>
const by = id => document.getElementById(id);
document.querySelector("form").addEventListener("submit", async event => {
  event.preventDefault();
  const button = document.querySelector("button");
  button.disabled = true;
  by("text").textContent = "...";
  let text, failed = true;
  try {
    const response = await fetch("api", {method: "PUT", body: JSON.stringify({
      prompts: [by("prompt").value], add_BOS: by("prompt").value === "",
      tokens_to_generate: by("tokens").valueAsNumber,
      temperature: by("temperature").valueAsNumber})});
    const reply = await response.json();
    failed = !response.ok;
    text = failed ? reply.message : reply.text[0];
  } catch (error) { text = String(error) }
  by("text").className = failed ? "error" : "";
  by("text").textContent = text;
  button.disabled = false;
});
</script>
</html>
"""
