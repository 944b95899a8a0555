import java.lang.reflect.Constructor;
import java.util.HashMap;
import java.util.Map;

/** What the tests and the stubs of the program's classes call. The tests are trusted, the program's replies are not. */
public class NanoRlhfTests {
    /** The program has ended, or its reply isn't a valid value. */
    static class Ended extends Error {
        Ended() {
            raised = this;
        }
    }

    /** The program has answered with an object of a class that isn't the prompt's. */
    static class NoValue extends Error {
        NoValue(String type) {
            super("the program's answer is no value but an object of " + type);
            isBroken = true;
        }
    }

    /** An exception of the program that isn't one of the JDK's. */
    static class ProgramException extends RuntimeException {
        ProgramException(String message) {
            super(message);
        }
    }

    /** An object of the program. It equals only itself: the program must not decide what is equal. */
    public static class Remote {
        final int number;

        protected Remote(Handle handle) {
            number = handle.number;
        }
    }

    public static class Handle {
        final int number;

        Handle(int number) {
            this.number = number;
        }
    }

    static int failures;
    static boolean isBroken; // whether an answer was an invalid object
    static Throwable raised; // the program's last exception
    static ClassLoader loader;
    private static final Map<Integer, Object> REMOTES = new HashMap<>();

    /** For the next program. */
    static void begin(ClassLoader ofTheTests) {
        failures = 0;
        isBroken = false;
        raised = null;
        loader = ofTheTests;
        REMOTES.clear();
    }

    /** Called instead of a test's throw for a wrong answer, so that the remaining tests still run. */
    public static synchronized void fail(String message) {
        failures++;
        System.err.println(message);
    }

    /** types: null for a field; target: null if static. */
    public static Object call(String owner, String name, String[] types, Object target, Object... arguments) {
        Object[] parts = {owner, name, types, target, arguments};
        byte[] call = NanoRlhfValues.toBytes(parts, NanoRlhfTests::numberOf);
        String type;
        String message;
        try {
            Object[] reply = (Object[]) NanoRlhfValues.fromBytes(NanoRlhfHarness.ask(call), NanoRlhfTests::remote);
            if ((boolean) reply[0]) {
                Object[] after = (Object[]) reply[2];
                for (int i = 0; i < Math.min(arguments.length, after.length); i++) {
                    NanoRlhfValues.restore(arguments[i], after[i]);
                }
                return reply[1];
            }
            type = (String) reply[1];
            message = (String) reply[2];
        } catch (RuntimeException error) {
            throw new ProgramException("the program's reply is no value: " + error);
        }
        throw thrown(type, message);
    }

    public static Handle handle(Object made) {
        return new Handle(made instanceof Remote remote ? remote.number : -1);
    }

    private static int numberOf(Object object) {
        if (object instanceof Remote remote) {
            return remote.number;
        }
        String name = object.getClass().getName();
        throw new ProgramException("the tests pass a " + name + ": only plain values can be sent");
    }

    private static Object remote(int number, String type) {
        return REMOTES.computeIfAbsent(number, n -> {
            try {
                Constructor<?> made = Class.forName(type, true, loader).getDeclaredConstructor(Handle.class);
                made.setAccessible(true);
                return made.newInstance(new Handle(n));
            } catch (ReflectiveOperationException error) {
                throw new NoValue(type);
            }
        });
    }

    /** Throws the same exception if the JDK has it: the tests may expect it. */
    private static RuntimeException thrown(String type, String message) {
        Throwable error = new ProgramException(type + ": " + message);
        try {
            Class<?> known = Class.forName(type, false, null); // the JDK's only
            if (Throwable.class.isAssignableFrom(known)) {
                try {
                    error = (Throwable) known.getConstructor(String.class).newInstance(message);
                } catch (NoSuchMethodException none) {
                    error = (Throwable) known.getConstructor().newInstance();
                }
            }
        } catch (ReflectiveOperationException unknown) {
            // stays a ProgramException
        }
        raised = error;
        return sneak(error);
    }

    @SuppressWarnings("unchecked")
    private static <E extends Throwable> RuntimeException sneak(Throwable error) throws E {
        throw (E) error;
    }
}
