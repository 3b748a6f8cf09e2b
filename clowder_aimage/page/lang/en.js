// The English texts. Other languages have the same keys; `{name}` is replaced by a value.

export const en = {
  // frame
  'header.skip': 'Skip to the content',
  'header.parts': 'Parts of the page',
  'header.language': 'Language: {name}',
  'header.light': 'Light colours',
  'header.dark': 'Dark colours',
  'tab.make': 'Make',
  'tab.gallery': 'Gallery',
  'tab.models': 'Models',
  'tab.chat': 'Chat',
  'dialog.close': 'Close',
  'connection.retrying': 'The worker does not answer. Trying again.',
  'connection.lost': 'The connection to the worker was lost.',
  'connection.status': 'The worker answered with the status {status}.',
  'unit.seconds': '{n} s',
  'unit.minutes': '{n} min {s} s',
  'unit.hours': '{n} h {m} min',
  // access
  'access.title': 'Access',
  'access.needed': 'This worker requires a token.',
  'access.token': 'Token',
  'access.hint': 'It is kept for this tab only, and sent to this worker only.',
  'access.enter': 'Sign in',
  'access.leave': 'Sign out',
  'access.unknown': 'The worker does not know this token.',
  'access.scope.admin': 'The token allows everything.',
  'access.scope.infer': 'The token allows making pictures and texts. Models cannot be changed.',
  'access.scope.node': 'The token is for nodes. It does not allow making pictures.',
  // make
  'make.prompt': 'Prompt',
  'make.go': 'Make',
  'make.cancel': 'Cancel',
  'make.model': 'Model',
};
